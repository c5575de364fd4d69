"""Matrix products: the library's and the project's kernel for few rows."""
