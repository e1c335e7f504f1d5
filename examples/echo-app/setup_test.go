package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/labstack/echo/v5"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// database is where a test's application keeps its orders.
type database struct{ dsn, file string }

// onEach runs a test on both databases.
func onEach(t *testing.T, test func(*testing.T, database)) {
	t.Helper()
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		test(t, database{dsn: testdb.Postgres(t).DSN})
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		test(t, sqliteFile(t))
	})
}

func sqliteFile(t *testing.T) database {
	return database{file: filepath.Join(t.TempDir(), "orders.db")}
}

// app is the application without its network.
type app struct {
	*api
	db     *gorm.DB
	ob     *outbox.Instance
	router *echo.Echo
}

func newApp(t *testing.T, d database) *app {
	t.Helper()
	log := zaptest.NewLogger(t, zaptest.Level(zap.ErrorLevel))
	db, err := openDatabase(d.dsn, d.file, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := closeDatabase(db); err != nil {
			t.Error(err)
		}
	})
	journal := NewJournal()
	ob, err := newOutbox(db, outbox.Each(journal.Deliver), log)
	if err != nil {
		t.Fatal(err)
	}
	a := &app{
		api: &api{orders: Orders{db, journal}, journal: journal, ready: ob.Check, closing: t.Context(), log: log},
		db:  db,
		ob:  ob,
	}
	a.router = a.handler()
	return a
}

// relay has messages delivered until the test ends.
func (a *app) relay(t *testing.T) {
	t.Helper()
	if err := a.ob.Start(context.WithoutCancel(t.Context())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(context.Background(), a.ob.Stop); err != nil {
			t.Error(err)
		}
	})
}

// serve gives the URL under which requests are answered until the test ends.
func (a *app) serve(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(a.router)
	t.Cleanup(server.Close)
	return server.URL
}

// waitFor gives an entry of the journal when it is as it should be.
func (a *app) waitFor(t *testing.T, orderID int64, typ string, is func(Entry) bool) Entry {
	t.Helper()
	deadline := time.After(patience)
	for {
		entries, _, changed := a.journal.Since(0)
		for _, e := range entries {
			if e.OrderID == orderID && e.Type == typ && is(e) {
				return e
			}
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("no such %s of order %d in %+v", typ, orderID, entries)
		}
	}
}

// wantStored checks what has been committed, and that the pool is whole: a
// transaction that was left open would hold a connection or a lock.
func (a *app) wantStored(t *testing.T, orders int64, messages int) {
	t.Helper()
	var n int64
	if err := a.db.Model(&Order{}).Count(&n).Error; err != nil {
		t.Fatal(err)
	}
	stats, err := a.ob.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if m := stats.Outboxes[0].Pending(); n != orders || m != messages {
		t.Errorf("%d orders and %d messages are stored, want %d and %d", n, m, orders, messages)
	}
}

// answer is what came of a request.
type answer struct {
	status int
	header http.Header
	body   string
}

// send makes a request and reads its answer.
func send(t *testing.T, method, url, body string) answer {
	t.Helper()
	got, rest := do(t, method, url, body)
	text, err := io.ReadAll(rest)
	if err != nil {
		t.Fatal(err)
	}
	got.body = string(text)
	return got
}

// watch opens a stream of events, which ends with the test.
func watch(t *testing.T, url string) *bufio.Scanner {
	t.Helper()
	_, stream := do(t, http.MethodGet, url+"/events", "")
	return bufio.NewScanner(stream)
}

// do makes a request, and leaves the body of its answer to be read.
func do(t *testing.T, method, url, body string) (answer, io.Reader) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return answer{status: resp.StatusCode, header: resp.Header}, resp.Body
}

// client keeps no connections, follows no redirects, and gives up some time.
func client() *http.Client {
	return &http.Client{
		Timeout:       patience,
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// wantError checks that an answer has the status, and says why.
func wantError(t *testing.T, a answer, status int, why string) {
	t.Helper()
	var reason struct {
		Error string `json:"error"`
	}
	if err := json.Unmarshal([]byte(a.body), &reason); err != nil || a.status != status || !strings.Contains(reason.Error, why) {
		t.Errorf("answered %d %s, want %d and an error with %q", a.status, a.body, status, why)
	}
}

const validOrder = `{"customer": "Grace Hopper", "item": "kettle", "quantity": 3}`
