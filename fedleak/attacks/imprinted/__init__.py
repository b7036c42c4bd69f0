"""What an imprinted first block leaves in an update, read back.

`bins` is the gradient of the feed-forward layer, split into sums over few tokens each; `tags` are
the texts' tags, from tokens that are alone in a bin; `slots` is every bin, split among the tokens
that can be in it; `checksum` compares a whole text with its tag; `chains` are the texts of a causal
model, whose tags tie each token to the one before it;
`attack` puts them together.
"""
