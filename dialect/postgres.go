package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

// Postgres keeps messages in PostgreSQL 14 or newer, directly or through a
// pooler in transaction mode. It implements engine.Storage.
//
// A lane is owned by an advisory lock that lives and dies with the transaction
// of one delivery. Over a pgx connection a cycle takes two round trips, one
// while there is more; another driver gets the same statements one by one.
//
// All instants are the database's. Every statement of its own is bounded by
// statementTimeout; a connection on which anything went wrong is closed.
type Postgres struct {
	db       *sql.DB
	pgx      bool // the pool's driver is pgx, which takes Go slices as arrays
	byOutbox map[string]*pgTable
	tables   []*pgTable // each once
}

var _ engine.Storage = (*Postgres)(nil)

// statementTimeout bounds one round trip of the storage's own, so that a
// server that does not answer is noticed. Keepalives notice a dead peer
// earlier where they are on.
const statementTimeout = 30 * time.Second

// NewPostgres makes a storage over db. It does not touch the database: the
// tables are the migrator's.
func NewPostgres(db *sql.DB, cfg Config) (*Postgres, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("postgres storage: %w", err)
	}
	_, isPgx := db.Driver().(*stdlib.Driver)
	p := &Postgres{db: db, pgx: isPgx, byOutbox: make(map[string]*pgTable, len(cfg.Outboxes))}
	byName := make(map[tables.Name]*pgTable)
	for _, outbox := range slices.Sorted(maps.Keys(cfg.Outboxes)) {
		name := cfg.Outboxes[outbox]
		if byName[name] == nil {
			byName[name] = newPgTable(name)
			p.tables = append(p.tables, byName[name])
		}
		p.byOutbox[outbox] = byName[name]
	}
	return p, nil
}

func (p *Postgres) table(outbox string) (*pgTable, error) {
	if t := p.byOutbox[outbox]; t != nil {
		return t, nil
	}
	return nil, fmt.Errorf("postgres storage: unknown outbox %q", outbox)
}

// pgTable is a message table with the statements that work on it.
type pgTable struct {
	name   tables.Name
	expand *strings.Replacer
	sql    pgSQL

	mu    sync.Mutex
	fetch map[pgShape]string
	large atomic.Bool // payloads are so large that the server should bound a page
}

// pgSQL holds the fixed statements of a table.
type pgSQL struct {
	own, delete, keep, fail, kill           string
	insertOne, insertMany, returning, locks string
	notify, channels, probe                 string
	strayLanes, strayRows, remap, tryLane   string
	pruneDelivered, pruneDead               string
}

func newPgTable(name tables.Name) *pgTable {
	t := &pgTable{name: name, fetch: make(map[pgShape]string), expand: strings.NewReplacer(
		"{messages}", name.Messages(),
		"{meta}", name.Meta(),
		"{oid}", tables.Literal(name.Messages())+"::regclass::oid::bigint",
	)}
	x := func(text string) string { return t.expand.Replace(pgFragments.Replace(text)) }
	t.sql = pgSQL{
		own: x(pgOwn), delete: x(pgDelete), keep: x(pgKeep), fail: x(pgFail), kill: x(pgKill),
		insertOne: x(pgInsertOne), insertMany: x(pgInsertMany), returning: x(pgReturning), locks: x(pgGroupLocks),
		notify: x(pgNotify), channels: x(pgChannels), probe: x(pgProbe),
		strayLanes: x(pgStrayLanes), strayRows: x(pgStrayRows), remap: x(pgRemap), tryLane: x(pgTryLane),
		pruneDelivered: x(pgPruneDelivered), pruneDead: x(pgPruneDead),
	}
	return t
}

// Locks. The key of a table is its oid, which the server finds as the
// statement's role sees the table: whatever the search_path, two sessions that
// mean the same table take the same lock, and no name has to be known.
//
// A lane's lock is in the space of two ints: the outbox, mixed with the table,
// and the partition's number whatever the count. A group's lock is a bigint:
// the table, 22 bits of the outbox's hash and one of 1,024 buckets, so that a
// large transaction cannot empty the server's lock table. Applications' own
// advisory locks stay clear of both as long as they are small numbers.
const (
	pgLaneKey = `(({oid} # $1::bigint)::bit(32)::int4), $2::int4`

	groupBuckets = 1024
)

// laneOutbox is the outbox's part of a lane's lock.
func laneOutbox(outbox string) int64 { return int64(engine.GroupHash(outbox) & 0xffffffff) }

// groupLock is the low half of a group's lock.
func groupLock(row *engine.Row) int64 {
	bucket := row.Hash % groupBuckets
	if row.LockAll {
		bucket = 0
	}
	return int64(engine.GroupHash(row.Outbox)&(1<<22-1))*groupBuckets + int64(bucket)
}

// array passes a list to a statement that casts it. Drivers other than pgx get
// it as text, which all of them can send.
func array[T int64 | int32 | string | []byte](native bool, list []T) any {
	if native {
		return list
	}
	var b strings.Builder
	b.WriteByte('{')
	for i, v := range list {
		if i > 0 {
			b.WriteByte(',')
		}
		switch v := any(v).(type) {
		case int64:
			b.WriteString(strconv.FormatInt(v, 10))
		case int32:
			b.WriteString(strconv.FormatInt(int64(v), 10))
		case string:
			b.WriteString(`"` + arrayEscaper.Replace(v) + `"`)
		case []byte:
			fmt.Fprintf(&b, `"\\x%x"`, v)
		}
	}
	b.WriteByte('}')
	return b.String()
}

var arrayEscaper = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

// pgNotify sends each hint on the channel of the table's schema: one channel,
// whatever the number of tables, which a role that can use the table can name.
const (
	pgNotify = `
SELECT pg_notify('gormoutbox_' || c.relnamespace::text, p.payload)
FROM pg_catalog.pg_class c, unnest($1::text[]) AS p(payload)
WHERE c.oid = {oid}::oid`

	pgChannels = `SELECT 'gormoutbox_' || c.relnamespace::text FROM pg_catalog.pg_class c WHERE c.oid = {oid}::oid`
)

// Notify implements engine.Storage.
func (p *Postgres) Notify(ctx context.Context, tx engine.Tx, wakes []engine.Wake) error {
	if tx == nil {
		tx = p.db
	}
	payloads := make(map[*pgTable][]string)
	for _, w := range wakes {
		t, err := p.table(w.Outbox)
		if err != nil {
			return err
		}
		payloads[t] = append(payloads[t], engine.EncodeWake(w))
	}
	for _, t := range p.tables {
		if len(payloads[t]) == 0 {
			continue
		}
		if _, err := tx.ExecContext(ctx, t.sql.notify, array(p.pgx, payloads[t])); err != nil {
			return fmt.Errorf("notify: %w", err)
		}
	}
	return nil
}

// Channels gives the names on which Notify sends, to be listened to.
func (p *Postgres) Channels(ctx context.Context) ([]string, error) {
	var channels []string
	seen := make(map[string]bool)
	for _, t := range p.tables {
		var name string
		if err := p.db.QueryRowContext(ctx, t.sql.channels).Scan(&name); err != nil {
			return nil, fmt.Errorf("notification channel of table %s: %w", t.name.Messages(), err)
		}
		if !seen[name] {
			seen[name] = true
			channels = append(channels, name)
		}
	}
	return channels, nil
}
