package outbox_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	goBlock  = regexp.MustCompile("(?s)```go\n(.*?)```")
	declares = regexp.MustCompile(`(?m)^(\w+)(?:, (\w+))? := `)
)

// readmeHead has what the parts of programs in the README take for granted.
const readmeHead = `package readme

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	. "github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/migrator"
)

var _ = []any{context.Canceled, fmt.Sprint, os.Getenv, strconv.Itoa, time.Now, postgres.Open, gorm.ErrInvalidDB, outbox.New, migrator.New, Envelope{}}

type Order struct{ ID int64 }
`

// readmeSource makes a package of a block of the README.
func readmeSource(block string) string {
	switch {
	case strings.HasPrefix(block, "package "):
		return block
	case strings.Contains(block, "\nfunc "):
		return readmeHead + block
	}
	var used strings.Builder
	for _, names := range declares.FindAllStringSubmatch(block, -1) {
		for _, name := range names[1:] {
			if name != "" {
				fmt.Fprintf(&used, "_ = %s\n", name)
			}
		}
	}
	return readmeHead + "func part(ctx context.Context, ob *outbox.Instance) error {\n" + block + used.String() + "return nil\n}\n"
}

// The code in the README compiles, and the program in it does what it should.
func TestReadme(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	overlay := map[string]string{} // has the packages be part of this module
	var packages, programs []string
	for i, block := range goBlock.FindAllStringSubmatch(string(text), -1) {
		name := fmt.Sprintf("readme%d", i)
		file := filepath.Join(dir, name+".go")
		writeFile(t, file, readmeSource(block[1]))
		overlay[filepath.Join(here, "internal", name, "readme.go")] = file
		packages = append(packages, "./internal/"+name)
		if strings.HasPrefix(block[1], "package main") {
			programs = append(programs, "./internal/"+name)
		}
	}
	list, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "overlay.json"), string(list))
	build := func(args ...string) {
		t.Helper()
		args = append([]string{"build", "-buildvcs=false", "-overlay", filepath.Join(dir, "overlay.json")}, args...)
		if out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	build(packages...)
	if len(programs) != 1 {
		t.Fatalf("there are %d programs", len(programs))
	}
	program := filepath.Join(dir, "program")
	build("-o", program, programs[0])
	runReadme(t, program)
}

func runReadme(t *testing.T, program string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Dir = t.TempDir()
	cmd.Stderr = t.Output()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if want := `-orders-1 order.placed {"order_id":1,"item":"teapot"}` + "\n"; err != nil || !strings.HasSuffix(line, want) {
		t.Errorf("it printed %q, %v", line, err)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
