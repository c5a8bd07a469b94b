"""Its folder goes onto the path: tests of single passes, a folder deeper, import generation_cases too."""
