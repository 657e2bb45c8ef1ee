from accelerate.report.charts import (
    Line as Line,
    Scale as Scale,
    draw_lines as draw_lines,
    draw_split as draw_split,
    plain_number as plain_number,
    split_lines as split_lines,
    ticks as ticks,
)
from accelerate.report.markup import clean as clean, render as render, tag as tag
from accelerate.report.page import write_page as write_page
from accelerate.report.reading import (
    CONFIG as CONFIG,
    Run as Run,
    read_run as read_run,
)
from accelerate.report.sections import finding as finding
from accelerate.report.series import (
    COLUMNS as COLUMNS,
    LINES as LINES,
    Column as Column,
    Point as Point,
    Series as Series,
    Split as Split,
)
from accelerate.report.summary import summarize as summarize
