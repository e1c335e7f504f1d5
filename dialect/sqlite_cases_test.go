package dialect_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/glebarez/sqlite"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/outboxtest/storagetest"
)

// openDSN opens a pool that is closed when the test ends.
func openDSN(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(sqlite.DriverName, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return db
}

func liteRow(group, typ string) engine.Row {
	return engine.Row{Outbox: storagetest.Orders, GroupKey: group, Hash: engine.GroupHash(group), Type: typ}
}

var litePage = engine.Query{Limit: 20, MaxBytes: 1 << 20}

// relay takes one batch of the only lane, calls deliver with it and settles all
// of it.
func (l *liteDB) relay(ctx context.Context, deliver func([]engine.Envelope) error) error {
	return l.storage.WithPartition(ctx, benchLane, func(ctx context.Context, c engine.Claim) error {
		page, err := c.Fetch(ctx, litePage)
		if err != nil || len(page.Envelopes) == 0 {
			return err
		}
		if err := deliver(page.Envelopes); err != nil {
			return err
		}
		var s engine.Settlement
		for _, e := range page.Envelopes {
			s.Delivered = append(s.Delivered, e.ID)
		}
		c.Settle(s)
		return nil
	})
}

// load runs publishers beside a worker until everything was delivered, and
// checks that each message was delivered once and the groups in order.
// beside is called in each delivery.
func (l *liteDB) load(t *testing.T, publishers, each int, beside func() error) {
	t.Helper()
	ctx := t.Context()
	var wg sync.WaitGroup
	for p := range publishers {
		wg.Go(func() {
			for i := range each {
				if err := l.add(ctx, liteRow(fmt.Sprint(p), fmt.Sprint(i))); err != nil {
					t.Errorf("add: %v", err)
				}
			}
		})
	}
	got := make(map[string][]string)
	for n := 0; n < publishers*each && !t.Failed(); {
		err := l.relay(ctx, func(batch []engine.Envelope) error {
			for _, e := range batch {
				got[e.GroupKey] = append(got[e.GroupKey], e.Type)
			}
			n += len(batch)
			return beside()
		})
		if err != nil {
			t.Errorf("relay: %v", err)
		}
	}
	wg.Wait()
	var want []string
	for i := range each {
		want = append(want, fmt.Sprint(i))
	}
	for p := range publishers {
		if !slices.Equal(got[fmt.Sprint(p)], want) {
			t.Errorf("group %d was delivered as %v", p, got[fmt.Sprint(p)])
		}
	}
	if page := l.peek(t); len(page.Envelopes) > 0 {
		t.Errorf("%d messages were delivered but not deleted", len(page.Envelopes))
	}
}

func (l *liteDB) peek(t *testing.T) (page engine.Page) {
	t.Helper()
	err := l.storage.WithPartition(t.Context(), benchLane, func(ctx context.Context, c engine.Claim) (err error) {
		page, err = c.Fetch(ctx, litePage)
		return err
	})
	if err != nil {
		t.Fatalf("fetch: %v", err)
	}
	return page
}

// C61: in every delivery somebody else writes, after the worker has read and
// before it settles. A settlement that began as a read would fail at once.
func TestSQLiteWritersBesideWorker(t *testing.T) {
	t.Parallel()
	for name, options := range map[string]string{
		"bare":                     "",
		"busy timeout":             "?_pragma=busy_timeout(10000)",
		"immediate":                "?_txlock=immediate",
		"immediate, time format":   "?_txlock=immediate&_time_format=sqlite",
		"exclusive, short timeout": "?_txlock=exclusive&_pragma=busy_timeout(5000)",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "app.db")
			setup := openDSN(t, path)
			if _, err := setup.ExecContext(t.Context(), "PRAGMA journal_mode = WAL; CREATE TABLE business (id INTEGER)"); err != nil {
				t.Fatal(err)
			}
			db := openDSN(t, path+options)
			l := openLite(t, db, nil)
			if err := l.storage.Check(t.Context()); err != nil {
				t.Errorf("check: %v", err)
			}
			l.load(t, 8, 15, func() error {
				_, err := setup.ExecContext(t.Context(), "INSERT INTO business VALUES (1)")
				return err
			})
		})
	}
}

// C61: the settlement waits for the write lock longer than SQLite does.
func TestSQLiteSettleOutlastsBusyTimeout(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	writer := openDSN(t, path+"?_pragma=journal_mode(WAL)")
	l := openLite(t, openDSN(t, path+"?_pragma=busy_timeout(1)"), nil)
	if err := l.add(t.Context(), liteRow("g", "a"), liteRow("g", "b")); err != nil {
		t.Fatal(err)
	}
	page := l.peek(t)
	for _, settlement := range []engine.Settlement{
		{Delivered: []int64{page.Envelopes[0].ID}},
		{Failed: []engine.Failure{{ID: page.Envelopes[1].ID, Error: "refused"}}},
	} {
		tx, err := writer.BeginTx(t.Context(), nil)
		if err == nil {
			_, err = tx.ExecContext(t.Context(), "UPDATE "+liteNames[storagetest.Orders].Meta()+" SET epoch = epoch")
		}
		if err != nil {
			t.Fatal(err)
		}
		settled := make(chan error, 1)
		go func() { settled <- l.storage.Settle(t.Context(), storagetest.Orders, settlement) }()
		ended, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if err := l.storage.Settle(ended, storagetest.Orders, settlement); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("settle beside a writer until its deadline = %v", err)
		}
		cancel()
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		if err := <-settled; err != nil {
			t.Errorf("settle beside a writer = %v", err)
		}
	}
	page = l.peek(t)
	if len(page.Envelopes) != 1 || page.Envelopes[0].Type != "b" || page.Envelopes[0].Attempts != 1 {
		t.Errorf("left over: %+v", page.Envelopes)
	}
}

// C62: while the relay works, a writer that does not wait at all gets through.
func TestSQLiteNoLockWhileDelivering(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	l := openLite(t, openDSN(t, path+"?_pragma=journal_mode(WAL)"), nil)
	impatient := &liteDB{db: openDSN(t, path+"?_pragma=busy_timeout(0)"), storage: l.storage}
	if err := l.add(t.Context(), liteRow("g", "a")); err != nil {
		t.Fatal(err)
	}
	for _, typ := range []string{"b", "c"} {
		err := l.relay(t.Context(), func([]engine.Envelope) error { return impatient.add(t.Context(), liteRow("g", typ)) })
		if err != nil {
			t.Errorf("add during a delivery: %v", err)
		}
	}
	if page := l.peek(t); len(page.Envelopes) != 1 || page.Envelopes[0].Type != "c" {
		t.Errorf("left over: %+v", page.Envelopes)
	}
}

// C63: with one connection nothing may need a second one.
func TestSQLiteOneConnection(t *testing.T) {
	t.Parallel()
	l := openLite(t, testdb.SQLite(t).SQL(t, testdb.PoolSize(1)), nil)
	ctx := t.Context()
	if err := l.storage.Check(ctx); err != nil {
		t.Errorf("check: %v", err)
	}
	mails := 0
	l.load(t, 2, 10, func() error {
		mails++
		_, probeErr := l.storage.Probe(ctx, []string{storagetest.Orders, storagetest.Audit})
		_, pruneErr := l.storage.Prune(ctx, engine.PruneQuery{Outbox: storagetest.Orders, Limit: 10})
		mail := liteRow("g", "mail")
		mail.Outbox = storagetest.Mails
		return errors.Join(probeErr, pruneErr, l.add(ctx, mail))
	})
	l.setPartitions(t, storagetest.Mails, 2)
	if moved, _, err := l.storage.Remap(ctx, storagetest.Mails, 100); err != nil || moved != mails {
		t.Errorf("remap = %d, %v, want %d", moved, err, mails)
	}
	if err := l.storage.Settle(ctx, storagetest.Mails, engine.Settlement{Failed: []engine.Failure{{ID: 1}}}); err != nil {
		t.Errorf("settle: %v", err)
	}
	release, err := l.storage.Exclude(ctx)
	if err != nil {
		t.Fatalf("exclude: %v", err)
	}
	if err := release(); err != nil {
		t.Errorf("release: %v", err)
	}
}

// C64
func TestSQLiteInMemory(t *testing.T) {
	t.Parallel()
	shared := func(t *testing.T) string {
		return "file:" + strings.ReplaceAll(t.Name(), "/", "_") + "?mode=memory&cache=shared"
	}
	t.Run("one connection", func(t *testing.T) {
		t.Parallel()
		db := openDSN(t, ":memory:")
		db.SetMaxOpenConns(1)
		memoryWorks(t, openLite(t, db, nil))
	})
	t.Run("shared cache", func(t *testing.T) {
		t.Parallel()
		memoryWorks(t, openLite(t, openDSN(t, shared(t)), nil))
	})
	t.Run("shared cache of a file", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "app.db")
		memoryWorks(t, openLite(t, openDSN(t, "file:"+path+"?cache=shared&_pragma=journal_mode(WAL)"), nil))
	})
	t.Run("a database for each connection", func(t *testing.T) {
		t.Parallel()
		l := openLite(t, openDSN(t, ":memory:"), nil)
		if err := l.storage.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "SetMaxOpenConns(1)") {
			t.Errorf("check = %v, want advice", err)
		}
	})
}

func memoryWorks(t *testing.T, l *liteDB) {
	t.Helper()
	if err := l.storage.Check(t.Context()); err != nil {
		t.Errorf("check: %v", err)
	}
	l.load(t, 3, 10, func() error { return nil })
	release, err := l.storage.Exclude(t.Context())
	if err != nil {
		t.Fatalf("exclude: %v", err)
	}
	if err := release(); err != nil {
		t.Errorf("release: %v", err)
	}
}

// C68: a rollback journal makes readers and writers stop each other.
func TestSQLiteCheckNamesWrongSettings(t *testing.T) {
	t.Parallel()
	for options, want := range map[string]string{
		"?_pragma=journal_mode(DELETE)":                        "set it to WAL",
		"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(0)":   "the busy timeout is 0",
		"?_pragma=journal_mode(TRUNCATE)":                      `"truncate"`,
		"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(100)": "",
	} {
		t.Run(options, func(t *testing.T) {
			t.Parallel()
			l := openLite(t, openDSN(t, filepath.Join(t.TempDir(), "app.db")+options), nil)
			err := l.storage.Check(t.Context())
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("check = %v, want %q", err, want)
			}
		})
	}
}

// C10: SQLite's driver for GORM says nothing when a savepoint does not exist,
// so nothing may depend on its word.
func TestSQLiteUnknownSavepoint(t *testing.T) {
	t.Parallel()
	file := testdb.SQLite(t)
	l := openLite(t, file.SQL(t), nil)
	err := file.Gorm(t).Transaction(func(tx *gorm.DB) error {
		if _, err := l.storage.Insert(t.Context(), tx.Statement.ConnPool.(*sql.Tx), []engine.Row{liteRow("g", "a")}, false); err != nil {
			return err
		}
		if err := tx.RollbackTo("nowhere").Error; err != nil {
			t.Logf("the driver reports the unknown savepoint now: %v", err)
		}
		_, err := l.storage.Insert(t.Context(), tx.Statement.ConnPool.(*sql.Tx), []engine.Row{liteRow("g", "b")}, true)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if page := l.peek(t); len(page.Envelopes) != 2 {
		t.Errorf("%d messages are stored, want both", len(page.Envelopes))
	}
}

// C05: a driver that leaves a statement out because its context has just ended
// must not make an add succeed.
func TestSQLiteInsertLeftOut(t *testing.T) {
	t.Parallel()
	l := newLite(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := l.storage.Insert(ctx, leavingOut{cancel: cancel}, []engine.Row{liteRow("g", "a")}, false)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("insert = %v, want context.Canceled", err)
	}
}

// leavingOut is a transaction whose context ends at each statement, which it
// reports as done.
type leavingOut struct {
	engine.Tx
	cancel func()
}

func (l leavingOut) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	l.cancel()
	return nil, nil
}

// A settlement either takes effect or fails, whenever its context ends.
func TestSQLiteSettleWithEndingContext(t *testing.T) {
	t.Parallel()
	l := newLite(t)
	for i := range 60 {
		if err := l.add(t.Context(), liteRow("g", fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
		id := l.peek(t).Envelopes[0].ID
		s := engine.Settlement{Delivered: []int64{id}}
		if i%2 == 0 {
			s.Failed = []engine.Failure{{ID: -1}} // this one takes a transaction
		}
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		if err := l.storage.Settle(ctx, storagetest.Orders, s); err == nil {
			if left := l.peek(t).Envelopes; len(left) != 0 {
				t.Fatalf("settled message %d is still there", left[0].ID)
			}
		} else if err := l.storage.Settle(t.Context(), storagetest.Orders, s); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNewSQLiteRefuses(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]dialect.Config{
		"no outboxes":      {},
		"a schema":         {Outboxes: liteOutboxes("a", "schema", "t")},
		"no table":         {Outboxes: liteOutboxes("a", "", "")},
		"an empty name":    {Outboxes: liteOutboxes("", "", "t")},
		"NUL in a name":    {Outboxes: liteOutboxes("a\x00b", "", "t")},
		"not UTF-8":        {Outboxes: liteOutboxes("\xff", "", "t")},
		"an over-long one": {Outboxes: liteOutboxes("a", "", strings.Repeat("t", 64))},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := dialect.NewSQLite(nil, config); err == nil {
				t.Error("it was accepted")
			}
		})
	}
}

func TestSQLiteUnknownOutbox(t *testing.T) {
	t.Parallel()
	s := newLite(t).storage
	const unknown = "nothing"
	_, insertErr := s.Insert(t.Context(), nil, []engine.Row{{Outbox: unknown}}, false)
	_, probeErr := s.Probe(t.Context(), []string{unknown})
	_, _, remapErr := s.Remap(t.Context(), unknown, 1)
	_, pruneErr := s.Prune(t.Context(), engine.PruneQuery{Outbox: unknown})
	for what, err := range map[string]error{
		"insert": insertErr, "probe": probeErr, "remap": remapErr, "prune": pruneErr,
		"settle": s.Settle(t.Context(), unknown, engine.Settlement{Delivered: []int64{1}}),
		"claim":  s.WithPartition(t.Context(), engine.Lane{Outbox: unknown}, nil),
	} {
		if err == nil || !strings.Contains(err.Error(), unknown) {
			t.Errorf("%s = %v, want an error that names the outbox", what, err)
		}
	}
}

func liteOutboxes(outbox, schema, table string) map[string]tables.Name {
	return map[string]tables.Name{outbox: {Schema: schema, Table: table}}
}
