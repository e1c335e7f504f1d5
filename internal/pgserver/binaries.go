package pgserver

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Names of environment variables.
const (
	// BinEnv holds the directory of the PostgreSQL programs. It goes before
	// everything else, also when it is wrong.
	BinEnv = "OUTBOX_PG_BIN"
	// PostgresEnv holds the DSN of the server to test on, as a superuser.
	PostgresEnv = "OUTBOX_TEST_POSTGRES"
	// BouncerEnv holds the DSN of a PgBouncer in front of that server, in
	// transaction pooling, which forwards every database name.
	BouncerEnv = "OUTBOX_TEST_PGBOUNCER"
)

// preferredMajor is taken where several versions are installed, so that runs on
// different machines are alike; without it the newest one is.
const preferredMajor = 15

// ErrNoBinaries is returned where the programs are not installed.
var ErrNoBinaries = errors.New("pgserver: not installed")

// FindBinaries returns the directory that holds initdb and postgres: the one
// that $OUTBOX_PG_BIN names, or that of version 15 under /usr/lib/postgresql,
// the one pg_config names, or the newest under /usr/lib/postgresql.
// ErrNoBinaries says that there is none.
func FindBinaries() (string, error) {
	if dir := os.Getenv(BinEnv); dir != "" {
		if !hasServer(dir) {
			return "", fmt.Errorf("%w: no initdb and postgres in %s=%s", ErrNoBinaries, BinEnv, dir)
		}
		return dir, nil
	}
	installed := installedVersions("/usr/lib/postgresql")
	candidates := slices.DeleteFunc(slices.Clone(installed), func(dir string) bool { return major(dir) != preferredMajor })
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		candidates = append(candidates, strings.TrimSpace(string(out)))
	}
	for _, dir := range append(candidates, installed...) {
		if hasServer(dir) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("%w: no initdb and postgres in $%s, pg_config --bindir or /usr/lib/postgresql/*/bin", ErrNoBinaries, BinEnv)
}

// FindBouncer returns the path of the pgbouncer program, or ErrNoBinaries.
func FindBouncer() (string, error) {
	// Debian keeps it outside the PATH of ordinary users.
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer", "/usr/local/sbin/pgbouncer"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: no pgbouncer in PATH or /usr/sbin", ErrNoBinaries)
}

// installedVersions lists root/*/bin, the newest first.
func installedVersions(root string) []string {
	dirs, _ := filepath.Glob(filepath.Join(root, "*", "bin")) // fails for a bad pattern only
	slices.SortFunc(dirs, func(a, b string) int { return cmp.Compare(major(b), major(a)) })
	return dirs
}

// major is the version in root/15/bin; 0 where there is none.
func major(bin string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(bin)))
	return n
}

func hasServer(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
			return false
		}
	}
	return true
}
