from hpcjobs.cli import main

main()
