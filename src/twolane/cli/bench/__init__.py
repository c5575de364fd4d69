"""The commands of `twolane bench`, one file each."""
