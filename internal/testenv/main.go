// Command testenv runs a command with the servers that the tests need:
//
//	go run ./internal/testenv -- go test ./...
//
// It starts a PostgreSQL unless OUTBOX_TEST_POSTGRES names one, and a PgBouncer
// in front of it unless OUTBOX_TEST_PGBOUNCER names one, sets these variables
// for the command, stops what it started, and exits with the command's code. As
// root it installs what is missing with apt-get. Where it cannot, the command
// runs without, so that tests are skipped, unless CI=true.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/gormoutbox/outbox/internal/pgserver"
)

// stopGrace is how long an interrupted command may take to end.
const stopGrace = 30 * time.Second

func main() {
	code, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
	}
	os.Exit(code)
}

// run returns the exit code; an error always comes with one that is not 0.
func run(args []string) (code int, err error) {
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		return 2, errors.New("usage: testenv [--] command [argument...]")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	var servers servers
	defer func() {
		if e := servers.stop(); e != nil {
			code, err = max(code, 1), errors.Join(err, e)
		}
	}()
	if err := servers.start(ctx); err != nil {
		if !errors.Is(err, pgserver.ErrNoBinaries) || os.Getenv("CI") == "true" {
			return 1, err
		}
		fmt.Fprintln(os.Stderr, "testenv: some tests will be skipped:", err)
	}
	return command(ctx, args, servers.env)
}

// command runs to its end. When ctx is done it is asked to end, and killed if it
// does not.
func command(ctx context.Context, args, env []string) (int, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopGrace
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, nil
	case !errors.As(err, &exit):
		return 1, err
	case exit.ExitCode() > 0:
		return exit.ExitCode(), nil
	default: // as a shell counts a command that a signal ended
		return 128 + int(exit.Sys().(syscall.WaitStatus).Signal()), err
	}
}
