from onetake.cli import main

main()
