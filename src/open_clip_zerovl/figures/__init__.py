"""What charts and pages share."""
