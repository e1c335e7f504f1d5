package dialect_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
	"github.com/gormoutbox/outbox/outboxtest/storagetest"
)

// liteNames are the tables of the tests' outboxes. A name that has to be
// quoted shows where it is not.
var liteNames = map[string]tables.Name{
	storagetest.Orders: {Table: `out"box`},
	storagetest.Mails:  {Table: `out"box`},
	storagetest.Audit:  {Table: "Audit Log"},
}

// liteDB is a migrated database file with a storage over it.
type liteDB struct {
	db      *sql.DB
	storage *dialect.SQLite
}

func newLite(t testing.TB) *liteDB { return openLite(t, testdb.SQLite(t).SQL(t), nil) }

// openLite migrates db and makes a storage with the given clock over it.
func openLite(t testing.TB, db *sql.DB, now func() time.Time) *liteDB {
	t.Helper()
	for _, name := range liteNames {
		m, err := migrator.New(db, migrator.Config{Dialect: migrator.SQLite, Table: name.Table})
		if err == nil {
			err = m.Up(t.Context())
		}
		if err != nil {
			t.Fatalf("migrate: %v", err)
		}
	}
	storage, err := dialect.NewSQLite(db, dialect.Config{Outboxes: liteNames, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	return &liteDB{db: db, storage: storage}
}

func TestSQLiteConformance(t *testing.T) {
	t.Parallel()
	storagetest.Run(t, storagetest.Harness{
		New: func(t *testing.T) storagetest.Instance { return newLite(t).instance() },
	})
}

func (l *liteDB) instance() storagetest.Instance {
	return storagetest.Instance{
		Storage:       l.storage,
		Begin:         l.begin,
		SetPartitions: l.setPartitions,
		SetPaused:     l.setPaused,
		SetDue: func(t *testing.T, outbox string, id int64, in time.Duration) {
			l.exec(t, "UPDATE "+liteNames[outbox].Messages()+" SET scheduled_at = ? WHERE id = ?", time.Now().Add(in).UnixMicro(), id)
		},
		Revive: func(t *testing.T, outbox string, id int64) {
			l.exec(t, "UPDATE "+liteNames[outbox].Messages()+" SET status = 'pending', scheduled_at = 0, attempts = 0, dead_at = NULL WHERE id = ?", id)
		},
	}
}

func (l *liteDB) begin(t *testing.T) storagetest.Tx {
	t.Helper()
	tx, err := l.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatalf("begin: %v", err)
	}
	return tx
}

func (l *liteDB) setPartitions(t *testing.T, outbox string, n int) {
	t.Helper()
	l.exec(t, "INSERT INTO "+liteNames[outbox].Meta()+" (outbox, partitions) VALUES (?, ?) ON CONFLICT (outbox) DO UPDATE SET partitions = excluded.partitions", outbox, n)
}

func (l *liteDB) setPaused(t *testing.T, outbox string, paused bool) {
	t.Helper()
	var at any
	if paused {
		at = time.Now().UnixMicro()
	}
	l.exec(t, "INSERT INTO "+liteNames[outbox].Meta()+" (outbox, paused_at) VALUES (?, ?) ON CONFLICT (outbox) DO UPDATE SET paused_at = excluded.paused_at", outbox, at)
}

func (l *liteDB) exec(t testing.TB, query string, args ...any) {
	t.Helper()
	if _, err := l.db.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// add inserts rows in a transaction of their own.
func (l *liteDB) add(ctx context.Context, rows ...engine.Row) error {
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := l.storage.Insert(ctx, tx, rows, false); err != nil {
		return err
	}
	return tx.Commit()
}
