package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/gormoutbox/outbox/internal/pgserver"
)

// fakeApt knows the package "good", which installs the returned file.
func fakeApt(t *testing.T) (installed string) {
	t.Helper()
	dir := t.TempDir()
	installed = filepath.Join(dir, "program")
	script := `#!/bin/sh
case "$*" in
update) ;;
install*good) : >"` + installed + `" ;;
*) exit 100 ;;
esac
`
	if err := os.WriteFile(filepath.Join(dir, "apt-get"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":/bin:/usr/bin")
	return installed
}

func TestEnsureInstallsWhatIsMissing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root installs")
	}
	program := fakeApt(t)
	calls := 0
	find := func() (string, error) {
		calls++
		if _, err := os.Stat(program); err != nil {
			return "", fmt.Errorf("%w: %w", pgserver.ErrNoBinaries, err)
		}
		return program, nil
	}
	if err := ensure(t.Context(), find, "unknown"); !errors.Is(err, pgserver.ErrNoBinaries) {
		t.Errorf("an unknown package: %v, want ErrNoBinaries", err)
	}
	if err := ensure(t.Context(), find, "unknown", "good"); err != nil {
		t.Fatalf("the second package: %v", err)
	}
	calls = 0
	t.Setenv("PATH", "")
	if err := ensure(t.Context(), find, "unknown"); err != nil || calls != 1 {
		t.Errorf("installed already: %d looks, %v", calls, err)
	}
}

func TestEnsureWithoutApt(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	find := func() (string, error) { return "", pgserver.ErrNoBinaries }
	if err := ensure(t.Context(), find, "good"); !errors.Is(err, pgserver.ErrNoBinaries) {
		t.Errorf("got %v, want ErrNoBinaries", err)
	}
	broken := errors.New("broken")
	if err := ensure(t.Context(), func() (string, error) { return "", broken }, "good"); !errors.Is(err, broken) {
		t.Errorf("got %v, want the error as it is", err)
	}
}
