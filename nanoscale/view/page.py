"""Self-contained HTML pages from the templates: no script, no other file."""

from __future__ import annotations

from typing import Any


def render(template: str, **values: Any) -> str:
    """Return the page of a template. All values are escaped, except charts."""
    import jinja2

    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("nanoscale.view"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return pages.get_template(template).render(values)
