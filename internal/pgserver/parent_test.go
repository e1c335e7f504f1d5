//go:build unix

package pgserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// childEnv makes the test binary a process that starts servers and waits.
const childEnv = "PGSERVER_TEST_CHILD"

// beChild prints what it has started, one line each, and waits to be killed, or
// for the end of its standard input.
func beChild() {
	s, err := Start(Options{})
	if err != nil {
		fmt.Println("error", err)
		return
	}
	fmt.Println(s.Dir(), s.DSN("postgres"))
	b, err := StartBouncer(s.DSN("postgres"), BouncerOptions{})
	if err != nil {
		fmt.Println("error", err)
		return
	}
	fmt.Println(b.home.dir, b.DSN("postgres"))
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	panic("the child was not killed")
}

func TestServersDieWithTheirParent(t *testing.T) {
	t.Parallel()
	_, noServer := FindBinaries()
	_, noBouncer := FindBouncer()
	if err := errors.Join(noServer, noBouncer); err != nil && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	for name, kill := range map[string]func(p *os.Process, stdin io.Closer) error{
		"killed":   func(p *os.Process, _ io.Closer) error { return p.Kill() },
		"panicked": func(_ *os.Process, stdin io.Closer) error { return stdin.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dieWithChild(t, kill)
		})
	}
}

func dieWithChild(t *testing.T, kill func(p *os.Process, stdin io.Closer) error) {
	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), childEnv+"=1")
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	server, bouncer := readPair(t, lines), readPair(t, lines)
	conn, err := pgx.Connect(t.Context(), server[1])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())

	if err := kill(child.Process, in); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := child.Wait(); !errors.As(err, &exit) {
		t.Fatalf("the child ended with %v", err)
	}

	// The connection breaks when the server is gone.
	if _, err := conn.WaitForNotification(t.Context()); err == nil {
		t.Error("got a notification from a dead server")
	}
	for _, dir := range []string{server[0], bouncer[0]} {
		waitGone(t, dir)
	}
}

func readPair(t *testing.T, lines *bufio.Scanner) []string {
	t.Helper()
	if !lines.Scan() {
		t.Fatalf("the child said nothing: %v", lines.Err())
	}
	pair := strings.Fields(lines.Text())
	if len(pair) != 2 || pair[0] == "error" {
		t.Fatalf("the child said %q", lines.Text())
	}
	return pair
}

// waitGone returns when the directory is gone; no event of another process's
// tells when.
func waitGone(t *testing.T, dir string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("directory %s is left", dir)
		}
	}
}

func TestEndOfAProcessThatEnded(t *testing.T) {
	t.Parallel()
	p, err := launch(exec.Command("/bin/sh", "-c", "exit 3"), nil, syscall.SIGKILL)
	if err != nil {
		t.Fatal(err)
	}
	<-p.done
	if err := p.end(syscall.SIGKILL); err != nil {
		t.Errorf("end: %v", err)
	}
	var exit *exec.ExitError
	if !errors.As(p.err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("got %v, want exit status 3", p.err)
	}
}
