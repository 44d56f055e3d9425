"""Data preparation: public datasets, your own pairs, copies of test pictures."""
