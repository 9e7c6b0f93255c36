"""Recipes: one complete YAML file per training stage, and the demo's prompts."""
