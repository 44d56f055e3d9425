"""The recipe on a model (sections 2.2, 3.2, 4.2, A.9): its flags, mixup, token drop, frozen towers, optimizer, step."""
