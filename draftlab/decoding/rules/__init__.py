"""The rules, one file each; `draftlab.decoding.verify` is the door to them."""
