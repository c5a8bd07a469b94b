"""Beside this file lie the cases and tools that the folders below share: pytest puts its folder on the path."""
