"""The OATO paper's study, predicted from a datasheet, beside the numbers that it reports (docs/paper.md)."""
