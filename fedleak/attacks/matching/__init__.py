"""Attacks that look for texts whose gradient is nearest to the observed one: DLG, TAG and LAMP."""
