"""One file for each subject; `settings.section_list` lists all, a worker loads only what it reads."""
