package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
	"go.uber.org/zap"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// childEnv has the test binary be another program.
const childEnv = "GIN_APP_TEST_CHILD"

func TestMain(m *testing.M) {
	gin.SetMode(gin.ReleaseMode)
	switch os.Getenv(childEnv) {
	case "app":
		main()
	case "hold":
		hold(os.Getenv("OUTBOX_DSN"), os.Getenv("ORDERS_DB"))
	default:
		testdb.Main(m)
	}
}

// child makes a process that is the given program.
func child(t *testing.T, program string, d database, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), childEnv+"="+program, "OUTBOX_DSN="+d.dsn, "ORDERS_DB="+d.file)
	cmd.Stderr = t.Output()
	return cmd
}

func TestOnce(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, d database) {
		out, err := child(t, "app", d, "-once").Output()
		if err != nil {
			t.Fatal(err)
		}
		var got struct {
			DedupID  string      `json:"dedup_id"`
			Type     string      `json:"type"`
			GroupKey string      `json:"group_key"`
			Payload  OrderPlaced `json:"payload"`
			Latency  *float64    `json:"latency_ms"`
		}
		dec := json.NewDecoder(bytes.NewReader(out))
		dec.UseNumber()
		if err := dec.Decode(&got); err != nil || dec.More() {
			t.Fatalf("not one JSON value (%v): %s", err, out)
		}
		want := OrderPlaced{OrderID: 1, Customer: "Ada Lovelace", Item: "teapot", Quantity: 2}
		if got.Type != placed || got.GroupKey != "1" || got.Payload != want || got.Latency == nil || !strings.HasSuffix(got.DedupID, "-gin-app-1") {
			t.Errorf("delivered %s", out)
		}
	})
}

func TestPortIsTaken(t *testing.T) {
	t.Parallel()
	taken, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	file := filepath.Join(t.TempDir(), "orders.db")
	cmd := child(t, "app", database{}, "-addr", taken.Addr().String(), "-db", file)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("ended with %v, want status 1", err)
	}
	if text := stderr.String(); !strings.Contains(text, taken.Addr().String()) || !strings.Contains(text, "-addr") {
		t.Errorf("said %q", text)
	}
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the database was touched: %v", err)
	}
}

// The end of the context, which a signal brings, ends streams that would never
// end by themselves, and the server.
func TestServeStops(t *testing.T) {
	t.Parallel()
	a := newApp(t, sqliteFile(t))
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- serve(ctx, listener, a.api) }()
	stream := watch(t, "http://"+listener.Addr().String())
	cancel()
	if err := <-served; err != nil {
		t.Errorf("serve: %v", err)
	}
	if stream.Scan() || stream.Err() != nil {
		t.Errorf("the stream said %q, %v", stream.Text(), stream.Err())
	}
	again, err := new(net.ListenConfig).Listen(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatalf("the server still listens: %v", err)
	}
	again.Close()
}

// hold is a program that places an order and is in the middle of its delivery
// for ever. It prints the message's DedupID when it begins.
func hold(dsn, file string) {
	db, err := openDatabase(dsn, file, zap.NewNop())
	if err != nil {
		panic(err)
	}
	relay := outbox.Each(func(_ context.Context, e outbox.Envelope) error {
		fmt.Println(e.DedupID())
		select {}
	})
	ob, err := newOutbox(db, relay, zap.NewNop())
	if err != nil {
		panic(err)
	}
	order := Order{Customer: "Ada", Item: "teapot", Quantity: 1}
	if err := (Orders{db, NewJournal()}).Place(context.Background(), &order); err != nil {
		panic(err)
	}
	if err := ob.Start(context.Background()); err != nil {
		panic(err)
	}
	select {}
}

// A process that is killed while it delivers has the message delivered by the
// next one, with the same identity.
func TestKilledInMidDelivery(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, d database) {
		cmd := child(t, "hold", d)
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		dedupID, err := bufio.NewReader(stdout).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // it was killed

		a := newApp(t, d)
		a.relay(t)
		e := a.waitFor(t, 1, placed, func(e Entry) bool { return e.DedupID != "" })
		if e.DedupID != strings.TrimSpace(dedupID) {
			t.Errorf("delivered as %s, before as %s", e.DedupID, dedupID)
		}
		if e.Attempts != 0 || e.LatencyMS != nil {
			t.Errorf("the entry is %+v", e)
		}
	})
}
