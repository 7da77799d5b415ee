"""Import and export models, adapters, tokenizers and recipes of other projects.

Read `weft.conversion.hf_import` first, and for recipes `weft.conversion.recipe_translation`.
"""
