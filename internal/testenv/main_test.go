package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/gormoutbox/outbox/internal/pgserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// named makes testenv start nothing.
func named(t *testing.T) {
	t.Setenv(pgserver.PostgresEnv, "postgres://server")
	t.Setenv(pgserver.BouncerEnv, "postgres://bouncer")
}

func TestExitCodeIsTheCommands(t *testing.T) {
	named(t)
	for script, want := range map[string]int{"exit 0": 0, "exit 7": 7, "kill -TERM $$": 128 + 15} {
		code, err := run([]string{"--", "sh", "-c", script})
		if code != want {
			t.Errorf("%s: code %d (%v), want %d", script, code, err, want)
		}
	}
	if code, err := run([]string{"no-such-command"}); code != 1 || err == nil {
		t.Errorf("a missing command: code %d, %v", code, err)
	}
	if code, err := run([]string{"--"}); code != 2 || err == nil {
		t.Errorf("no command: code %d, %v", code, err)
	}
}

func TestInterruptEndsTheCommand(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	started := filepath.Join(t.TempDir(), "started")
	if err := syscall.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = os.ReadFile(started) // until the command has opened and closed it
		cancel()
	}()
	code, err := command(ctx, []string{"sh", "-c", `: >"$0"; exec sleep 1000`, started}, nil)
	if code != 128+int(syscall.SIGTERM) {
		t.Errorf("code %d (%v), want that of SIGTERM", code, err)
	}
}

func TestServersAreStartedForTheCommand(t *testing.T) {
	t.Setenv(pgserver.PostgresEnv, "")
	t.Setenv(pgserver.BouncerEnv, "")
	for _, find := range []func() (string, error){pgserver.FindBinaries, pgserver.FindBouncer} {
		if _, err := find(); errors.Is(err, pgserver.ErrNoBinaries) && os.Getenv("CI") != "true" {
			t.Skip(err)
		}
	}
	out := filepath.Join(t.TempDir(), "env")
	code, err := run([]string{"sh", "-c", `echo "$` + pgserver.PostgresEnv + ` $` + pgserver.BouncerEnv + `" >"$0"`, out})
	if code != 0 || err != nil {
		t.Fatalf("code %d, %v", code, err)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(string(b)); len(got) != 2 || got[0] == got[1] {
		t.Errorf("the command saw %q, want two addresses", b)
	}
}
