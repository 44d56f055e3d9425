"""A trial: arms trained on the same pairs with the same compute, over seeds, and one verdict (`zerovl trial`)."""
