"""`patchgen doctor RECIPE`: what is wrong with a checkpoint, its data and their recipe, found before training on them.

report = examine(recipe)
print(report.text())          # a table: passed, failed with what to do, not checked with why
report.exit_status            # 1 if anything failed
"""

from patchgen.runtime.doctor.examination import CHECKS, Report, examine, format_entry

__all__ = ["CHECKS", "Report", "examine", "format_entry"]
