package testdb_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/gormoutbox/outbox/internal/pgserver"
)

// leakEnv makes TestLeak leave a goroutine behind.
const leakEnv = "TESTDB_TEST_LEAK"

func TestLeak(t *testing.T) {
	if os.Getenv(leakEnv) == "" {
		t.Skip("for TestMainFindsLeaks")
	}
	go func() { select {} }()
}

// runSelf runs one test of this binary in a process with more environment.
func runSelf(t *testing.T, test string, env ...string) (output string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run", "^"+test+"$")
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestMainFindsLeaks(t *testing.T) {
	t.Parallel()
	out, err := runSelf(t, "TestLeak", leakEnv+"=1")
	if err == nil || !strings.Contains(out, "found unexpected goroutines") {
		t.Errorf("a leak went through (%v):\n%s", err, out)
	}
}

func TestMissingServer(t *testing.T) {
	t.Parallel()
	none := []string{pgserver.PostgresEnv + "=", pgserver.BouncerEnv + "=", pgserver.BinEnv + "=" + t.TempDir()}
	for _, test := range []string{"TestPostgresIsolatesTests", "TestPgBouncerIsolatesTests"} {
		out, err := runSelf(t, test, append(none, "CI=")...)
		if err != nil || !strings.Contains(out, "--- SKIP") {
			t.Errorf("%s was not skipped (%v):\n%s", test, err, out)
		}
		out, err = runSelf(t, test, append(none, "CI=true")...)
		if err == nil || !strings.Contains(out, "not installed") {
			t.Errorf("CI did not fail %s (%v):\n%s", test, err, out)
		}
	}
}

func TestServerOfTheEnvironment(t *testing.T) {
	t.Parallel()
	for dsn, want := range map[string]string{
		"host=127.0.0.1 port=1":                    "is not a URL",
		"postgres://127.0.0.1:1/x?sslmode=disable": "failed to connect",
	} {
		out, err := runSelf(t, "TestPostgresIsolatesTests", pgserver.PostgresEnv+"="+dsn)
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: want %q (%v):\n%s", dsn, want, err, out)
		}
	}
}
