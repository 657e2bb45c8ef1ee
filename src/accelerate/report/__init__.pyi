from accelerate.report.charts import (
    Line as Line,
    Scale as Scale,
    draw_lines as draw_lines,
    draw_phases as draw_phases,
    format_number as format_number,
    split_lines as split_lines,
    ticks as ticks,
)
from accelerate.report.markup import render as render, sanitize as sanitize, tag as tag
from accelerate.report.page import write_page as write_page
from accelerate.report.reading import CONFIG as CONFIG, Run as Run, read_run as read_run
from accelerate.report.sections import conclusion_text as conclusion_text, mesh_lines as mesh_lines
from accelerate.report.series import (
    MAX_COLUMNS as MAX_COLUMNS,
    MAX_LINES as MAX_LINES,
    Column as Column,
    PhaseSeconds as PhaseSeconds,
    Point as Point,
    Series as Series,
)
from accelerate.report.summary import finite_values as finite_values, summarize as summarize
