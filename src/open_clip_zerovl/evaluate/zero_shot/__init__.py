"""Zero-shot classification: labelled sets, classifiers of class names in templates, accuracy."""
