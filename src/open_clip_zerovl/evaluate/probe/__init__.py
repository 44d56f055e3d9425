"""The linear probe (section 5.3, A.7)."""
