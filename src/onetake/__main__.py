from onetake.cli.main import main

main()
