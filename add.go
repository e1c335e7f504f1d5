package outbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/gormoutbox"
	"github.com/gormoutbox/outbox/migrator"
)

// Add adds events to their outboxes, in the transaction that tx is in: if it
// commits, each is delivered at least once; if it rolls back, none ever
// existed. Within a group they are delivered in the order of the arguments.
//
// Everything is validated before the database is touched, so that an event
// that is refused adds nothing and leaves the transaction usable. The errors
// are ErrNotInTransaction, ErrNotInstalled, ErrAmbiguousInstance,
// ErrUnknownOutbox, ErrInvalidMessage, that of BeforeAdd, and after them
// ErrGroupBusy and whatever the database says; these last two abort a
// PostgreSQL transaction.
//
// On PostgreSQL, Add takes the lock of each group until the transaction ends,
// so that groups keep the order of commits. It waits for other transactions
// that have added to the same groups, and is therefore best called last.
//
// No events are nothing to do. The context is that of the handle.
func Add(tx *gorm.DB, events ...Event) error {
	_, err := addVia(tx, events, false)
	return err
}

// AddReturning is Add that returns what was stored, in the order of events.
func AddReturning(tx *gorm.DB, events ...Event) ([]Envelope, error) {
	return addVia(tx, events, true)
}

// Add is the function Add for a database on which several instances are
// installed.
func (in *Instance) Add(tx *gorm.DB, events ...Event) error {
	_, err := in.add(tx, events, false)
	return err
}

// AddReturning is the function AddReturning for a database on which several
// instances are installed.
func (in *Instance) AddReturning(tx *gorm.DB, events ...Event) ([]Envelope, error) {
	return in.add(tx, events, true)
}

func addVia(tx *gorm.DB, events []Event, returning bool) ([]Envelope, error) {
	if len(events) == 0 {
		return nil, nil
	}
	in, err := only(tx)
	if err != nil {
		return nil, err
	}
	return in.add(tx, events, returning)
}

// only finds the one instance that was given to db.Use.
func only(tx *gorm.DB) (*Instance, error) {
	if tx == nil || tx.Config == nil {
		return nil, fmt.Errorf("%w: the handle is nil or was not opened", ErrNotInTransaction)
	}
	var found *Instance
	for _, plugin := range tx.Plugins {
		in, ok := plugin.(*Instance)
		switch {
		case !ok:
		case found != nil:
			return nil, fmt.Errorf("%w: call Add of the one that is meant", ErrAmbiguousInstance)
		default:
			found = in
		}
	}
	if found == nil {
		return nil, errNoPlugin
	}
	return found, nil
}

func (in *Instance) add(tx *gorm.DB, events []Event, returning bool) ([]Envelope, error) {
	if len(events) == 0 {
		return nil, nil
	}
	b, err := in.binding()
	if err != nil {
		return nil, err
	}
	own, err := b.transaction(tx)
	if err != nil {
		return nil, err
	}
	ctx := tx.Statement.Context
	rows, err := in.rows(ctx, events)
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("outbox: add: %w", context.Cause(ctx))
	}
	stored, err := b.storage.Insert(ctx, own, rows, returning)
	if err != nil {
		return nil, b.addError(ctx, rows, err)
	}
	wakes := wakesOf(rows)
	if in.config.Notify == InTransaction {
		if err := b.storage.Notify(ctx, own, wakes); err != nil {
			return nil, fmt.Errorf("outbox: add: %w", err)
		}
	}
	own.OnCommit(func() { b.hub.Committed(wakes) })
	return stored, nil
}

// transaction is what the handle is in, which must be one of the instance's
// database: with several sources, dbresolver may begin one on another.
func (b *binding) transaction(tx *gorm.DB) (*gormoutbox.Tx, error) {
	own, err := gormoutbox.From(tx)
	switch {
	case errors.Is(err, gormoutbox.ErrNotInstalled):
		return nil, fmt.Errorf("%w: %w", ErrNotInstalled, err)
	case err != nil:
		return nil, fmt.Errorf("outbox: add: %w", err)
	}
	if pool, err := tx.DB(); err == nil && pool != b.pool {
		return nil, fmt.Errorf("%w: the transaction is on another database than the instance, which would not find the message", ErrNotInstalled)
	}
	return own, nil
}

// rows turns events into what is stored. It touches no database.
func (in *Instance) rows(ctx context.Context, events []Event) ([]engine.Row, error) {
	rows := make([]engine.Row, len(events))
	for i, event := range events {
		m, err := in.message(ctx, i, event)
		if err != nil {
			return nil, err
		}
		rows[i] = in.row(m)
	}
	return rows, nil
}

// message is the valid message of an event, with its outbox's name.
func (in *Instance) message(ctx context.Context, i int, event Event) (Message, error) {
	invalid := func(err error) error {
		return fmt.Errorf("%w: event %d (%T): %w", ErrInvalidMessage, i, event, err)
	}
	if event == nil {
		return Message{}, invalid(errors.New("it is nil"))
	}
	m, err := event.OutboxMessage()
	if err != nil {
		return Message{}, invalid(err)
	}
	if m.Outbox == "" && in.config.DefaultOutbox != NoDefault {
		m.Outbox = in.config.DefaultOutbox
	}
	if err := in.beforeAdd(ctx, &m); err != nil {
		return Message{}, fmt.Errorf("outbox: BeforeAdd of event %d (%T): %w", i, event, err)
	}
	if m.Outbox == "" {
		return Message{}, invalid(problem("Outbox", "is empty and there is no default; it must be one of %s", quoted(in.config.names())))
	}
	o, err := in.outbox(m.Outbox)
	if err != nil {
		return Message{}, fmt.Errorf("%w (event %d, %T)", err, i, event)
	}
	if err := m.validate(o.RequireGroup); err != nil {
		return Message{}, invalid(fmt.Errorf("type %q: %w", excerpt(m.Type), err))
	}
	return m, nil
}

// beforeAdd calls the hook with headers of the message's own.
func (in *Instance) beforeAdd(ctx context.Context, m *Message) error {
	if in.config.BeforeAdd == nil {
		return nil
	}
	headers := make(map[string]string, len(m.Headers))
	maps.Copy(headers, m.Headers)
	m.Headers = headers
	return in.config.BeforeAdd(ctx, m)
}

func (in *Instance) row(m Message) engine.Row {
	o := in.outboxes[m.Outbox]
	row := engine.Row{
		Outbox:    m.Outbox,
		GroupKey:  m.GroupKey,
		Type:      m.Type,
		Payload:   m.Payload,
		Headers:   m.Headers,
		DeliverAt: m.DeliverAt,
		Delay:     m.Delay,
	}
	switch {
	case o.Ordering == Total:
		row.Lock = !o.ConcurrentPublishers
		row.LockAll = row.Lock
	case o.Ordering == None || m.GroupKey == "":
		row.Hash = rand.Uint64() >> 1 // anywhere; 63 bits like GroupHash
	default:
		row.Hash = engine.GroupHash(m.GroupKey)
		row.Lock = !o.ConcurrentPublishers
	}
	return row
}

// addError says what an insert failed of.
func (b *binding) addError(ctx context.Context, rows []engine.Row, err error) error {
	if b.dialect == migrator.Postgres && locks(rows) && (ctx.Err() != nil || sqlState(err) == lockNotAvailable) {
		return fmt.Errorf("outbox: add: %w: %w", ErrGroupBusy, err)
	}
	return fmt.Errorf("outbox: add: %w", err)
}

func locks(rows []engine.Row) bool {
	return slices.ContainsFunc(rows, func(r engine.Row) bool { return r.Lock })
}

// lockNotAvailable is the SQLSTATE of a statement that lock_timeout ended.
const lockNotAvailable = "55P03"

func sqlState(err error) string {
	var pg interface{ SQLState() string }
	if !errors.As(err, &pg) {
		return ""
	}
	return pg.SQLState()
}

// maxWakes is how many groups of an outbox are woken one by one.
const maxWakes = 64

// wakesOf gives the hints for rows that were added, each once.
func wakesOf(rows []engine.Row) []engine.Wake {
	byOutbox := make(map[string][]engine.Wake)
	for _, row := range rows {
		list := byOutbox[row.Outbox]
		wake := engine.Wake{Outbox: row.Outbox, Hash: row.Hash}
		switch {
		case slices.Contains(list, wake) || len(list) == 1 && list[0].All:
		case len(list) == maxWakes:
			byOutbox[row.Outbox] = []engine.Wake{{Outbox: row.Outbox, All: true}}
		default:
			byOutbox[row.Outbox] = append(list, wake)
		}
	}
	return slices.Concat(slices.Collect(maps.Values(byOutbox))...)
}
