"""`zerovl plan`: data, memory, time and disk of a training run. `zerovl doctor`: a check of this machine."""
