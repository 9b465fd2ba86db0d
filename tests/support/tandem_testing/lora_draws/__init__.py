"""Adapters that PEFT makes from drawn configs, and what the engine does with them."""
