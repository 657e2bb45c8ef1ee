"""Lists on the terminal that are walked with the arrow keys."""

from accelerate.commands.menu.selection_menu import BulletMenu as BulletMenu
