"""Fine-tune a small encoder with the Trainer of transformers, as its examples do; nothing is downloaded."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return {"input_ids": torch.randint(1000, (64,)), "labels": index % 2}


def main():
    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512
    )
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=32, num_train_epochs=1, learning_rate=5e-5, bf16=True,
        report_to=[], logging_steps=1, eval_strategy="epoch", gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer = Trainer(
        BertForSequenceClassification(config), arguments, train_dataset=Sentences(), eval_dataset=Sentences()
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
