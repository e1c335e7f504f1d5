package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/gormoutbox/outbox"
)

// nodeCommand is the first argument of a process that relays for another one.
const nodeCommand = "node"

const nodeReady = "ready"

// runNode relays the messages of the database until the standard input closes.
// It writes a line once it listens, and then one for each message: its serial
// number and the time in nanoseconds since 1970.
func runNode(ctx context.Context, dsn string) error {
	db, pool, err := open(dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	relay := reporter(func(a arrival) { fmt.Println(a.serial, a.at.UnixNano()) })
	in, err := install(ctx, db, outbox.Config{}, outbox.Outbox{Relay: relay})
	if err != nil {
		return err
	}
	if err := in.Start(ctx); err != nil {
		return err
	}
	if err := awaitPush(ctx, in); err != nil {
		return errors.Join(err, in.Stop(ctx))
	}
	fmt.Println(nodeReady)
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, in.Stop(ctx))
}

// awaitPush returns when the instance is reached by notifications.
func awaitPush(ctx context.Context, in *outbox.Instance) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		stats, err := in.Stats(ctx)
		if err != nil {
			return fmt.Errorf("wait for push: %w", err)
		}
		if stats.Push == "push" {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for push: it is %q: %w", stats.Push, ctx.Err())
		}
	}
}

// relayElsewhere publishes here and relays in another process.
func relayElsewhere(ctx context.Context, dsn string) (*relaying, error) {
	db, pool, err := open(dsn)
	if err != nil {
		return nil, err
	}
	if _, err := install(ctx, db, outbox.Config{}, outbox.Outbox{Relay: outbox.Elsewhere}); err != nil {
		return nil, errors.Join(err, pool.Close())
	}
	r := &relaying{db: db, payload: payload(), arrivals: make(chan arrival, loads[1].n)}
	stop, err := startNode(ctx, dsn, r.arrivals)
	if err != nil {
		return nil, errors.Join(err, pool.Close())
	}
	r.stop = func() error { return errors.Join(stop(), pool.Close()) }
	return r, nil
}

// startNode starts this program as a relaying process and returns when it
// listens. stop ends it.
func startNode(ctx context.Context, dsn string, arrivals chan<- arrival) (stop func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, nodeCommand, dsn)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() || lines.Text() != nodeReady {
		return nil, errors.Join(errors.New("the relaying process did not get ready"), stdin.Close(), cmd.Wait())
	}
	read := make(chan error, 1)
	go func() { read <- readArrivals(lines, arrivals) }()
	return func() error {
		closed := stdin.Close()
		return errors.Join(closed, <-read, cmd.Wait())
	}, nil
}

func readArrivals(lines *bufio.Scanner, arrivals chan<- arrival) error {
	for lines.Scan() {
		var serial int
		var nanos int64
		if _, err := fmt.Sscan(lines.Text(), &serial, &nanos); err != nil {
			return fmt.Errorf("line %q of the relaying process: %w", lines.Text(), err)
		}
		arrivals <- arrival{serial, time.Unix(0, nanos)}
	}
	return lines.Err()
}
