package dialect

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

// Admin gives the administration of the storage's tables.
func (p *Postgres) Admin() *Admin {
	a := newAdmin(pgAdmin{p})
	for name, t := range p.byOutbox {
		a.outboxes[name] = t.name
	}
	return a
}

// pgAdmin is the adminSyntax of Postgres.
type pgAdmin struct{ storage *Postgres }

func (pgAdmin) bind(n int) string         { return "$" + strconv.Itoa(n) }
func (pgAdmin) now() string               { return "statement_timestamp()" }
func (pgAdmin) epoch() string             { return "'epoch'::timestamptz" }
func (pgAdmin) size(column string) string { return "octet_length(" + column + ")" }

// using leaves the choice to the planner, with the settings of a walk.
func (pgAdmin) using(name tables.Name, _ source) string { return name.Messages() }

func (pgAdmin) ago(d time.Duration) string {
	return fmt.Sprintf("statement_timestamp() - %d * interval '1 microsecond'", d.Microseconds())
}

func (pgAdmin) micros(instant string) string {
	return "(extract(epoch FROM " + instant + ") * 1000000)::bigint"
}

// Ids travel as text, which every driver and protocol can send. The cast is the
// parameter's type, so that the planner sees the list.
func (pgAdmin) amongIDs(arg string) string { return "id = ANY(" + arg + "::bigint[])" }
func (pgAdmin) idList(ids []int64) string  { return array(false, ids).(string) }

func (pgAdmin) contains(column, arg string) string {
	return "strpos(" + column + ", " + arg + ") > 0"
}

// The planner settings of reads. A table that is empty at one moment and huge
// at the next has statistics that make a scan of all of it look cheap. A walk
// takes everything in the order of an index.
const (
	pgReadSettings = `SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)`
	pgWalkSettings = pgReadSettings + `, set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true)`
)

func (p pgAdmin) read(ctx context.Context, walk bool, fn func(engine.Tx) error) error {
	settings := pgReadSettings
	if walk {
		settings = pgWalkSettings
	}
	return p.transaction(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted, ReadOnly: true}, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, settings); err != nil {
			return fmt.Errorf("prepare to read: %w", err)
		}
		return fn(tx)
	})
}

// write repeats a transaction that met another one, such as a worker that
// settles the same messages in another order.
func (p pgAdmin) write(ctx context.Context, fn func(engine.Tx) error) error {
	const attempts = 10
	var err error
	for range attempts {
		err = p.transaction(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted}, func(tx *sql.Tx) error { return fn(tx) })
		if !isConflict(err) {
			break
		}
	}
	return err
}

func (p pgAdmin) transaction(ctx context.Context, opts *sql.TxOptions, fn func(*sql.Tx) error) error {
	tx, err := p.storage.db.BeginTx(ctx, opts)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer tx.Rollback() // does nothing after the commit
	if err := fn(tx); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// isConflict recognises a deadlock, which the server has resolved by ending
// this transaction, and a serialization failure.
func isConflict(err error) bool {
	state := sqlState(err)
	return state == "40P01" || state == "40001"
}

// sqlState is the error code of the server, as pgx and lib/pq give it.
func sqlState(err error) string {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) {
		return coded.SQLState()
	}
	return ""
}

// pgOwners finds the locks of the outboxes $1, whose parts of the keys are $2.
const pgOwners = `
SELECT k.outbox, l.objid::bigint, l.pid, COALESCE(a.application_name, ''), COALESCE(host(a.client_addr), '')
FROM unnest($1::text[], $2::bigint[]) AS k(outbox, hash)
JOIN pg_catalog.pg_locks l ON l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
	AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
	AND l.classid::bigint = (%s::regclass::oid::bigint # k.hash)::bit(32)::bigint
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid`

func (p pgAdmin) owners(ctx context.Context, tx engine.Tx, name tables.Name, outboxes []string) (map[laneKey]Owner, error) {
	hashes := make([]int64, len(outboxes))
	for i, outbox := range outboxes {
		hashes[i] = laneOutbox(outbox)
	}
	rows, err := tx.QueryContext(ctx, fmt.Sprintf(pgOwners, tables.Literal(name.Messages())), array(p.storage.pgx, outboxes), array(false, hashes))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	owners := make(map[laneKey]Owner)
	for rows.Next() {
		var lane laneKey
		var o Owner
		if err := rows.Scan(&lane.outbox, &lane.partition, &o.PID, &o.Application, &o.Client); err != nil {
			return nil, err
		}
		owners[lane] = o
	}
	return owners, rows.Err()
}
