"""Pictures found by words or by a picture: `zerovl search`."""
