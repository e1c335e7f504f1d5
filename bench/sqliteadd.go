package main

import (
	"context"
	"errors"
	"strconv"
	"time"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
)

const handLiteInsert = `INSERT INTO outboxer_messages (inserted_at, outbox, partitions, partition, group_key, type, payload) VALUES (?, ?, ?, ?, ?, ?, ?)`

// sqliteAdd compares transactions of nothing but a message.
func sqliteAdd(ctx context.Context, b *bench) (err error) {
	l, err := newLite(ctx, outbox.Outbox{Relay: outbox.Elsewhere})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	body := payload()
	ours := func(group string) error {
		return l.with.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			return outbox.Add(tx, outbox.Message{Type: messageType, GroupKey: group, Payload: body})
		})
	}
	hand := func(group string) error {
		return l.without.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			return tx.Exec(handLiteInsert, time.Now().UnixMicro(), orders, 1, 0, group, messageType, body).Error
		})
	}
	ratio, err := b.compare("sqlite-add", "transactions/s",
		func() (float64, error) { return l.slice(ctx, ours) },
		func() (float64, error) { return l.slice(ctx, hand) })
	if err != nil {
		return err
	}
	b.atLeast("sqlite-add", ratio, 0.8)
	return nil
}

// slice runs transactions of one writer for a while, on an empty table, and
// returns how many a second there were.
func (l *liteDB) slice(ctx context.Context, add func(group string) error) (float64, error) {
	if err := l.reset(ctx); err != nil {
		return 0, err
	}
	begun := time.Now()
	n := 0
	for ; time.Since(begun) < addSlice; n++ {
		if err := add("group-" + strconv.Itoa(n)); err != nil {
			return 0, err
		}
	}
	return perSecond(n, time.Since(begun)), nil
}
