package dialect_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
	"github.com/gormoutbox/outbox/outboxtest/storagetest"
)

// TestPostgresConformance runs the contract over every way a connection may
// speak. C33
func TestPostgresConformance(t *testing.T) {
	t.Parallel()
	modes := map[string][]testdb.Option{
		"cache statement": nil,
		"cache describe":  {testdb.ExecMode(pgx.QueryExecModeCacheDescribe)},
		"describe exec":   {testdb.ExecMode(pgx.QueryExecModeDescribeExec)},
		"exec":            {testdb.ExecMode(pgx.QueryExecModeExec)},
		"simple protocol": {testdb.ExecMode(pgx.QueryExecModeSimpleProtocol)},
		"repeatable read": {testdb.Param("default_transaction_isolation", "repeatable read")}, // C18
		"serializable":    {testdb.Param("default_transaction_isolation", "serializable")},    // C18
	}
	for name, opts := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			storagetest.Run(t, storagetest.Harness{
				ConcurrentWriters: true,
				New: func(t *testing.T) storagetest.Instance {
					pg := testdb.Postgres(t)
					return pgInstance(t, pg.SQL(t, opts...), pg.SQL(t, opts...))
				},
			})
		})
	}
}

// outboxes are those of the conformance suite.
var outboxes = map[string]tables.Name{
	storagetest.Orders: {Table: "outboxer_messages"},
	storagetest.Mails:  {Table: "outboxer_messages"},
	storagetest.Audit:  {Table: `Audit "log"`},
}

// newPostgres migrates the suite's tables and opens a storage over them.
func newPostgres(t testing.TB, db *sql.DB) *dialect.Postgres {
	t.Helper()
	for _, name := range outboxes {
		m, err := migrator.New(db, migrator.Config{Dialect: migrator.Postgres, Schema: name.Schema, Table: name.Table})
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	s, err := dialect.NewPostgres(db, dialect.Config{Outboxes: outboxes})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func pgInstance(t *testing.T, db, peer *sql.DB) storagetest.Instance {
	exec := func(t *testing.T, outbox, query string, args ...any) {
		t.Helper()
		name := outboxes[outbox]
		if _, err := db.ExecContext(t.Context(), fmt.Sprintf(query, name.Messages(), name.Meta()), args...); err != nil {
			t.Fatal(err)
		}
	}
	return storagetest.Instance{
		Storage: newPostgres(t, db),
		Peer:    newPostgres(t, peer),
		Begin: func(t *testing.T) storagetest.Tx {
			tx, err := db.BeginTx(context.Background(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
			if err != nil {
				t.Fatal(err)
			}
			return tx
		},
		SetPartitions: func(t *testing.T, outbox string, n int) {
			exec(t, outbox, `INSERT INTO %[2]s (outbox, partitions) VALUES ($1, $2) ON CONFLICT (outbox) DO UPDATE SET partitions = excluded.partitions`, outbox, n)
		},
		SetPaused: func(t *testing.T, outbox string, paused bool) {
			exec(t, outbox, `INSERT INTO %[2]s (outbox, paused_at) VALUES ($1, CASE WHEN $2 THEN now() END) ON CONFLICT (outbox) DO UPDATE SET paused_at = excluded.paused_at`, outbox, paused)
		},
		SetDue: func(t *testing.T, outbox string, id int64, in time.Duration) {
			exec(t, outbox, `UPDATE %[1]s SET scheduled_at = statement_timestamp() + $1::bigint * interval '1 microsecond' WHERE id = $2`, in.Microseconds(), id)
		},
		Revive: func(t *testing.T, outbox string, id int64) {
			exec(t, outbox, `UPDATE %[1]s SET status = 'pending', attempts = 0, dead_at = NULL, scheduled_at = 'epoch' WHERE id = $1`, id)
		},
	}
}

var _ engine.Storage = (*dialect.Postgres)(nil)
