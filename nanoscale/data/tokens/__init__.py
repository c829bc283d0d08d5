"""Tokens in files, and tokenizers."""
