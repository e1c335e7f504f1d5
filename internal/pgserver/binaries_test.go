package pgserver

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestInstalledVersionsAreSortedByNumber(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, v := range []string{"9.6", "14", "100", "18"} {
		if err := os.MkdirAll(filepath.Join(root, v, "bin"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for _, dir := range installedVersions(root) {
		got = append(got, filepath.Base(filepath.Dir(dir)))
	}
	if want := []string{"100", "18", "14", "9.6"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestFindBinariesTrustsTheVariable(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(BinEnv, dir)
	if got, err := FindBinaries(); !errors.Is(err, ErrNoBinaries) {
		t.Fatalf("an empty directory gave %q, %v", got, err)
	}
	for _, name := range []string{"initdb", "postgres"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := FindBinaries(); err != nil || got != dir {
		t.Errorf("got %q, %v, want %q", got, err, dir)
	}
}
