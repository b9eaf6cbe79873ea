"""From a request's messages or text to token ids, and from token ids back to text."""
