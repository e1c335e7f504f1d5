package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/gormoutbox/outbox/internal/pgserver"
)

// A figure measures one thing and adds what it found to the report.
type figure struct {
	name    string
	measure func(context.Context, *bench) error
}

var figures = []figure{
	{"pg-drain", pgDrain},
	{"pg-wal", pgWAL},
	{"pg-add", pgAdd},
	{"sqlite-drain", sqliteDrain},
	{"sqlite-add", sqliteAdd},
	{"latency", latency},
	{"idle", idle},
}

// bench is what the figures share.
type bench struct {
	runs    int
	rows    int    // of the backlog that pg-drain drains
	profile string // file for a CPU profile of pg-drain; empty: none
	explain bool   // print the plans of pg-drain

	report
	server *pgserver.Server // nil: no figure has needed it so far
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == nodeCommand {
		exit(runNode(context.Background(), os.Args[2]))
	}
	b := &bench{}
	only := flag.String("only", "", "measure only the figures whose name contains this `text`")
	flag.IntVar(&b.runs, "runs", 5, "`number` of runs")
	flag.IntVar(&b.rows, "rows", 200_000, "`messages` that pg-drain drains")
	flag.StringVar(&b.profile, "cpuprofile", "", "write a CPU profile of pg-drain, of the outbox's side of the last run, to this `file`")
	flag.BoolVar(&b.explain, "explain", false, "print what EXPLAIN (ANALYZE, BUFFERS) says of pg-drain's fetches")
	flag.Parse()
	if flag.NArg() > 0 || b.runs < 1 || b.rows < 1 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	exit(b.run(ctx, *only))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func (b *bench) run(ctx context.Context, only string) (err error) {
	defer func() {
		if b.server != nil {
			err = errors.Join(err, b.server.Stop(pgserver.Fast))
		}
	}()
	for _, f := range figures {
		if !strings.Contains(f.name, only) {
			continue
		}
		fmt.Fprintln(os.Stderr, "measuring", f.name)
		if err := f.measure(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
	}
	return b.print(os.Stdout)
}
