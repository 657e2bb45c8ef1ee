"""Menus on the terminal in which the arrow keys select."""

from accelerate.commands.menu.selection_menu import BulletMenu as BulletMenu
