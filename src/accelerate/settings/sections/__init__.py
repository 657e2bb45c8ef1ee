"""One file for each subject; `settings.catalogue` lists them all, a worker loads only what it reads."""
