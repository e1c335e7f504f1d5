//go:build unix

package pgserver

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// tailBytes is how much of a program's output goes into an error.
	tailBytes = 4096
	// portAttempts bounds how often a port that somebody took is replaced.
	portAttempts = 5
	// readyTimeout bounds how long a program may take until it accepts
	// connections.
	readyTimeout = time.Minute
	readyPoll    = 20 * time.Millisecond
)

// process is a running program and the goroutine that waits for it.
type process struct {
	pid  int
	done chan struct{} // closed when it has ended
	err  error         // how it ended; read after done
}

// launch starts cmd as the unprivileged user, such that it gets the signal when
// this process dies.
func launch(cmd *exec.Cmd, cred *syscall.Credential, onParentDeath syscall.Signal) (*process, error) {
	// A group of its own keeps the terminal's interrupt from it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred, Setpgid: true}
	dieWithParent(cmd.SysProcAttr, onParentDeath)
	if cmd.Env == nil {
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	}
	p := &process{done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// The kernel takes the end of the starting thread for the end of the
		// parent, so that the thread must outlive the program.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			p.pid = cmd.Process.Pid
		}
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// end signals p, unless it has ended, and waits for its end.
func (p *process) end(sig syscall.Signal) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	if err := syscall.Kill(p.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.pid, err)
	}
	<-p.done
	return nil
}

// run runs a program to its end; its output is in the error.
func run(cmd *exec.Cmd, cred *syscall.Credential) error {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	p, err := launch(cmd, cred, syscall.SIGKILL)
	if err != nil {
		return err
	}
	<-p.done
	if p.err != nil {
		return fmt.Errorf("%w: %s", p.err, tail(out.Bytes()))
	}
	return nil
}

// waitReady returns when dsn accepts a connection, or p has ended.
func (p *process) waitReady(dsn string) error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(ctx, dsn)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-p.done:
			return fmt.Errorf("it ended before it was ready: %w", cmp.Or(p.err, errors.New("exit status 0")))
		case <-ctx.Done():
			return fmt.Errorf("not ready within %v: %w", readyTimeout, err)
		case <-tick.C:
		}
	}
}

func tail(b []byte) string {
	b = bytes.TrimSpace(b)
	return string(b[max(0, len(b)-tailBytes):])
}

// onFreePort calls start with a port that was free a moment ago, and with
// another one if it failed because somebody took the port in between.
func onFreePort(start func(port int) error) error {
	var errs []error
	for range portAttempts {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return fmt.Errorf("find a port: %w", err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		_ = l.Close()
		if err = start(port); err == nil || !taken(port) {
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func taken(port int) bool {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return true
	}
	_ = l.Close()
	return false
}
