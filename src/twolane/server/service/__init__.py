"""The served model: from an API's request to its generation. It knows none of the APIs."""
