"""Text and tokens: tokenizers, chat templates, preprocessing, detokenization and grammars."""
