"""Several benchmarks' rows as one file, one picture and one table.

    python -m fusedcomm.bench.collect bench/results/cpu-shaped run1.json run2.json ... > summary.md

writes bench/results/cpu-shaped.json, .md and .png, and prints the README's table. Without further files it draws what
is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fusedcomm.bench.report import markdown, read_json, summary, write_json, write_plot


def main(arguments: list[str]) -> int:
    if not arguments:
        print("collect: give the results' path without suffix, then the JSON files to collect", file=sys.stderr)
        return 2
    target, sources = Path(arguments[0]), [Path(name) for name in arguments[1:]]
    json_path = target.with_suffix(".json")
    try:
        rows = [row for path in sources or [json_path] for row in read_json(path)]
        write_json(json_path, rows)
    except (OSError, ValueError, TypeError) as error:
        print(f"collect: {error}; give files that `fusedcomm bench --json` wrote", file=sys.stderr)
        return 2
    write_plot(target.with_suffix(".png"), rows)
    target.with_suffix(".md").write_text(markdown(rows) + "\n", encoding="utf-8")
    print(summary(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
