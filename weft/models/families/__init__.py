"""Model families: values for the keys of a decoder, and names of weights."""
